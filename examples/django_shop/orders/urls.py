"""Addresses of the shop."""

from django.urls import path

from . import views

urlpatterns = [path("orders/<str:number>/paid", views.pay)]
